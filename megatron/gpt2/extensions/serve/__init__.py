"""The text generation server, which `tools/run_text_generation_server.py` starts."""
