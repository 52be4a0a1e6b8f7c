"""Admission control of the thesis UCB/EECS-2022-88, chapter 4: whole workflows reserved over time."""
