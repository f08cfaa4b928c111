"""Parts of `tools/run_text_generation_server.py`, which finds them beside itself: nothing else imports them, but
tests."""
