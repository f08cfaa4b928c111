"""Parts of `bench_collectives.py`: nothing else imports them, but tests."""
