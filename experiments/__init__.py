"""What the README and docs/ claim, measured: papers' tables, speed, kills, load."""
