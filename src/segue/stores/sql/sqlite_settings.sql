-- What every connection sets before anything else.

PRAGMA busy_timeout = 5000;

PRAGMA journal_mode = WAL;

PRAGMA foreign_keys = ON;

-- Freed space is overwritten, so that deleting erases.
PRAGMA secure_delete = ON;

PRAGMA temp_store = MEMORY;

-- Only macOS knows the difference, and there a plain fsync is no promise.
PRAGMA fullfsync = ON;
