"""A backend for a device that is really the host, so that it runs anywhere."""
