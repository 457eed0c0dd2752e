"""What a run writes down about itself."""
