-- What the containers of an owner have used on a day of UTC.
CREATE TABLE sandbox_usage (
    day TEXT NOT NULL,
    owner TEXT NOT NULL,
    container_s REAL NOT NULL,
    cpu_s REAL NOT NULL,
    egress_bytes INTEGER NOT NULL,
    ingress_bytes INTEGER NOT NULL,
    PRIMARY KEY (day, owner)
);

PRAGMA user_version = 12;
