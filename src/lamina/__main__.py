"""`python -m lamina` is `lamina`."""

from lamina.cli import main

main()
