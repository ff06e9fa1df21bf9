"""The only home of imports of frameworks and loggers; nothing here is imported before you ask for it."""
