"""KaaS and the schedulers of the thesis UCB/EECS-2022-88, chapter 6: one request at a time on a whole GPU."""
