"""Engine: simulated ranks, their devices and groups - a program runs, and what it does becomes ops."""
