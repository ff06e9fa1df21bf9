"""`trimtab doctor`: examines a training before its first epoch. The checks are in `checks`, their machinery is here."""
