"""`python -m sayso` is the command line."""

from sayso.cli import main

main()
