"""Entry point of `python -m benchmarks.frontier`."""

from benchmarks.frontier.cli import frontier, run_command

if __name__ == "__main__":
    run_command(frontier)
