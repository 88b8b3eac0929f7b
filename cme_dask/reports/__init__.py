"""Reports for people: pages of HTML that need neither a network nor scripts."""
