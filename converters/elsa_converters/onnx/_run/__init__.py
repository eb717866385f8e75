"""Run levels on this machine, and measure what each costs."""
