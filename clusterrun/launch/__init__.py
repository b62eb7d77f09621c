"""From what was asked to what will run: pure arithmetic over a spec and facts handed in."""
