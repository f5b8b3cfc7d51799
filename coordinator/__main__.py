"""`python -m wavekeeper.coordinator` is the same as `wavekeeper`."""

from .cli import main

if __name__ == "__main__":
    main()
