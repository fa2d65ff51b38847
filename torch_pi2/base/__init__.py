"""What everything stands on: files, fields, units, and how modules are looked at. Knows nothing of neurons."""
