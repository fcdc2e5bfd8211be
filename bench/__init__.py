"""Timing: cases, cold-cache replays, the read floor, accuracy, peers. `python -m bench`; torch in `peers.py` and nowhere else."""
