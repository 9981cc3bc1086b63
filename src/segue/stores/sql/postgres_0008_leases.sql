-- A process that stood still must not write over what others have announced meanwhile.

-- The process that ends what a dead one left; a lease that is claimed so cannot be renewed.
ALTER TABLE workers ADD COLUMN claimed_by text;

-- The process that wrote the turn last, also once it has ended: nobody else may.
ALTER TABLE turns ADD COLUMN saved_by text;

-- Entered for a process that seemed dead: what that process counted itself replaces it, once.
ALTER TABLE usage ADD COLUMN is_provisional boolean NOT NULL DEFAULT false;

-- Counts the draws on a key: of two at the same time one is told to try again, and nobody holds a lock meanwhile.
ALTER TABLE meters ADD COLUMN version bigint NOT NULL DEFAULT 0;
