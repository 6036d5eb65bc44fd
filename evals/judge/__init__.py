"""How good the judge is: what it kills, passes, and names."""
