"""The text generation server, `tools/run_text_generation_server.py`."""
