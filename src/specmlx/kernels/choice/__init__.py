"""What is known of each operator's kernels: checked and raced on the user's chip, kept in a file."""
