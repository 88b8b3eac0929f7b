"""What people see: progress, tables, pictures, peak memory."""
