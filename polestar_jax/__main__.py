"""`python -m polestar_jax`: the command line."""

from polestar_jax.cli import main

if __name__ == "__main__":
    main()
