"""``python -m msmon_cli``."""

from msmon_cli.app import main

main()
