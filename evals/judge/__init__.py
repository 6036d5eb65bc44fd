"""How good the judge is: what it kills, what it passes, what it calls faults, how fast it is."""
