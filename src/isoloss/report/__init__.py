"""Drawing and laying out the page of a study; it knows nothing of any one study."""
