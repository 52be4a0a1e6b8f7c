"""Attack campaigns: faults against real servers, judged by what their clients were told."""
