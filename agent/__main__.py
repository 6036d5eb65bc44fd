"""`python -m coda_agent.agent`: the command line where no console script is installed."""

from coda_agent.agent.cli import main

main()
