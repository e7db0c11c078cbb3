"""What ``app.doctor`` looks at: this host, its libraries, a folder of slides."""
