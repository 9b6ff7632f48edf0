"""`python -m lapilli.cli`."""

from lapilli.cli import main

main()
