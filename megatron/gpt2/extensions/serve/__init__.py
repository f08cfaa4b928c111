"""Parts of `run_text_generation_server.py`: nothing else imports them, but tests."""
