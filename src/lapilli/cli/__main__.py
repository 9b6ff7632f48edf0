"""`python -m lapilli.cli`."""

from lapilli.command import main

main()
