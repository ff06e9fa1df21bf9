"""What checks try out on a training; everything is undone afterwards."""
