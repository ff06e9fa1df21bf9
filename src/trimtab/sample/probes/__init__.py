"""What is looked at beside the gradients, one probe per file."""
