"""The start of a runner: plans of memory and threads, trial steps, pools."""
