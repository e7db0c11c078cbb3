"""What a slide is: regions, levels, coordinates, pixels at any resolution."""
