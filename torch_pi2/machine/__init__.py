"""What a machine is: its profile, presets, and where its measurements are kept."""
