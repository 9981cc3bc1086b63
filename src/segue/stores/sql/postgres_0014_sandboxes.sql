-- What the containers of an owner have used on a day of UTC.
CREATE TABLE sandbox_usage (
    day text NOT NULL,
    owner text NOT NULL,
    container_s double precision NOT NULL,
    cpu_s double precision NOT NULL,
    egress_bytes bigint NOT NULL,
    ingress_bytes bigint NOT NULL,
    PRIMARY KEY (day, owner)
);
