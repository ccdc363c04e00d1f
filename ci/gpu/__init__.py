"""What one GPU shows, in named parts."""
