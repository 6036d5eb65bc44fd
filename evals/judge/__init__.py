"""How good the judge is: mutants it must kill, right programs it must pass, what it says of faults.

The judge itself is handed in: this room imports no agent.
"""
