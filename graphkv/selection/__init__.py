"""Which manager serves a setting, and which settings are refused before anything is built."""
