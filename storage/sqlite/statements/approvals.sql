-- A page of requests is found by its keys first, as one of runs. Few requests are pending: to find somebody's,
-- all that are pending are looked through, instead of all requests of that one.

-- name: find_approval
SELECT
    approval.approval_key, approval.session_key, approval.tenant_id, approval.user_id, session.session_id,
    run.run_id, approval.approval_id, approval.tool_name, approval.digest, approval.request,
    approval.checksum, approval.requested_at, approval.expires_at, approval.state, approval.decided_at,
    approval.decided_by, approval.reason
FROM approval
JOIN session ON session.session_key = approval.session_key
JOIN run ON run.run_key = approval.run_key
WHERE approval.tenant_id = :tenant_id AND approval.user_id = :user_id AND approval.approval_id = :approval_id;

-- name: add_approval
INSERT INTO approval (
    session_key, run_key, tenant_id, user_id, approval_id, tool_name, digest, request, checksum,
    requested_at, expires_at, state, decided_at, decided_by, reason
)
VALUES (
    :session_key, :run_key, :tenant_id, :user_id, :approval_id, :tool_name, :digest, :request, :checksum,
    :requested_at, :expires_at, :state, :decided_at, :decided_by, :reason
);

-- name: settle_approval
UPDATE approval
SET state = :state, decided_at = :decided_at, decided_by = :decided_by, reason = :reason
WHERE approval_key = :approval_key AND state = 'pending';

-- name: cancel_approvals_of
UPDATE approval
SET state = 'cancelled', reason = :reason
WHERE run_key = :run_key AND state = 'pending';

-- name: delete_approvals_of
DELETE FROM approval
WHERE session_key = :session_key;

-- name: list_approvals (across tenants: for operators)
SELECT approval_key
FROM approval
WHERE approval_key > :after AND (:state IS NULL OR state = :state)
ORDER BY approval_key
LIMIT :limit;

-- name: list_approvals_of_tenant (across users: of one tenant)
SELECT approval_key
FROM approval
WHERE tenant_id = :tenant_id AND approval_key > :after AND (:state IS NULL OR state = :state)
ORDER BY approval_key
LIMIT :limit;

-- name: list_approvals_of_user (across sessions: of one user)
SELECT approval_key
FROM approval
WHERE tenant_id = :tenant_id AND user_id = :user_id AND approval_key > :after
    AND (:state IS NULL OR state = :state)
ORDER BY approval_key
LIMIT :limit;

-- name: list_approvals_of_session
SELECT approval.approval_key
FROM session
JOIN approval ON approval.session_key = session.session_key
WHERE session.tenant_id = :tenant_id AND session.user_id = :user_id AND session.session_id = :session_id
    AND approval.approval_key > :after AND (:state IS NULL OR approval.state = :state)
ORDER BY approval.approval_key
LIMIT :limit;

-- name: list_approvals_of_run
SELECT approval.approval_key
FROM run
JOIN session ON session.session_key = run.session_key
JOIN approval ON approval.run_key = run.run_key
WHERE run.tenant_id = :tenant_id AND run.user_id = :user_id AND run.run_id = :run_id
    AND session.session_id = :session_id
    AND approval.approval_key > :after AND (:state IS NULL OR approval.state = :state)
ORDER BY approval.approval_key
LIMIT :limit;

-- name: list_pending_approvals (across tenants: for operators)
SELECT approval_key
FROM approval INDEXED BY approval_by_state
WHERE state = 'pending' AND approval_key > :after
ORDER BY approval_key
LIMIT :limit;

-- name: list_pending_approvals_of_tenant (across users: of one tenant)
SELECT approval_key
FROM approval INDEXED BY approval_by_state
WHERE tenant_id = :tenant_id AND state = 'pending' AND approval_key > :after
ORDER BY approval_key
LIMIT :limit;

-- name: list_pending_approvals_of_user (across sessions: of one user)
SELECT approval_key
FROM approval INDEXED BY approval_by_state
WHERE tenant_id = :tenant_id AND user_id = :user_id AND state = 'pending' AND approval_key > :after
ORDER BY approval_key
LIMIT :limit;

-- name: read_listed_approval
SELECT
    approval.approval_key, approval.session_key, approval.tenant_id, approval.user_id, session.session_id,
    run.run_id, approval.approval_id, approval.tool_name, approval.digest, approval.request,
    approval.checksum, approval.requested_at, approval.expires_at, approval.state, approval.decided_at,
    approval.decided_by, approval.reason
FROM approval
JOIN session ON session.session_key = approval.session_key
JOIN run ON run.run_key = approval.run_key
WHERE approval.approval_key = :approval_key;
