"""Many runs: launchers, and what they launch."""
