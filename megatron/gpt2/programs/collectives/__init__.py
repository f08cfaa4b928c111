"""Parts of `tools/bench_collectives.py`, which finds them beside itself: nothing else imports them, but tests."""
