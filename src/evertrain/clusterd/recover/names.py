"""Words of the recovery protocol: states, signals, actions, strategies, codes, labels. As on the wire."""

from __future__ import annotations

# States. Those in which a recovery rests; what the original passes through in no time has no state here.
INIT = "INIT"
FLUSHING = "NotifyWaitFaultFlushingState"
"""The faults are known, and a platform has yet to say what it wants."""
STOPPING = "NotifyStopTrainState"
"""Nobody listens who could be told to stop."""
STOPPED = "WaitReportStopCompleteState"
GLOBAL_FAULT = "NotifyGlobalFaultState"
"""A platform confirms the faults, or a chip is given the time to mend itself."""
OFFERS = "WaitReportRecoverStrategyState"
DECIDED = "NotifyDecidedStrategyState"
"""Decided, but something has to happen before it is told."""
RETRY_STATUS = "WaitReportStepRetryStatusState"
RECOVER_STATUS = "WaitReportProcessRecoverStatusState"
DUMP_STATUS = "WaitReportDumpStatusState"
RESCHEDULING = "ListenScheduleResultState"
"""All processes start again, and the pods at fault are replaced."""
FAULT_RETRY = "FaultRetryState"
"""The whole job is rescheduled."""
KILL_JOB = "NotifyKillJobState"
SCALE_IN_RANKS = "WaitReportScaleInIsolateRanksState"
SCALE_IN_STATUS = "WaitReportScaleInStatusState"
SCALED = "ScaleRunningState"
SCALE_OUT_STATUS = "WaitReportScaleOutStatusState"
PAUSING = "WaitReportPauseCompleteState"
SWITCHING_NICS = "WaitSwitchNicFinishedState"
STRESSING = "WaitStressTestFinishedState"
CONTINUING = "WaitContinueTrainState"
NEW_POD = "WaitNewPodState"
HOT_PAUSE = "WaitReportPauseResultState"
OLD_POD = "WaitOldPodDeletedState"
MIGRATING = "WaitReportRestartTrainResultState"
STOP_JOB = "NotifyStopJobState"

STATES = (
    INIT, FLUSHING, STOPPING, STOPPED, GLOBAL_FAULT, OFFERS, DECIDED, RETRY_STATUS, RECOVER_STATUS, DUMP_STATUS,
    RESCHEDULING, FAULT_RETRY, KILL_JOB, SCALE_IN_RANKS, SCALE_IN_STATUS, SCALED, SCALE_OUT_STATUS, PAUSING,
    SWITCHING_NICS, STRESSING, CONTINUING, NEW_POD, HOT_PAUSE, OLD_POD, MIGRATING, STOP_JOB,
)  # fmt: skip

REBUILD = "rebuild"
"""The replacements have their places: processes start, groups are built and states repaired."""

PHASES = {
    FLUSHING: "platform",
    STOPPING: "client",
    STOPPED: "stop",
    GLOBAL_FAULT: "confirm",
    OFFERS: "agree",
    DECIDED: "prepare",
    RETRY_STATUS: "retry",
    RECOVER_STATUS: "recover",
    DUMP_STATUS: "dump",
    RESCHEDULING: "restart",
    FAULT_RETRY: "reschedule",
    KILL_JOB: "end",
    SCALE_IN_RANKS: "shrink",
    SCALE_IN_STATUS: "shrink",
    SCALED: "smaller",
    SCALE_OUT_STATUS: "grow",
    PAUSING: "pause",
    SWITCHING_NICS: "switch links",
    STRESSING: "stress test",
    CONTINUING: "continue",
    NEW_POD: "backup",
    HOT_PAUSE: "get ready",
    OLD_POD: "delete pod",
    MIGRATING: "migrate",
    STOP_JOB: "reschedule",
}
"""What people read in the timeline."""

# Signals.
PRE_EXIT, STOP_TRAIN, SAVE_AND_EXIT = "preExitProcess", "stopTrain", "saveAndExit"
GLOBAL, CHANGE_STRATEGY, NODES_EXIT, KILL_MASTER = "globalFault", "changeStrategy", "faultNodesExit", "killMaster"
HOT_SWITCH, PAUSE_START, CONTINUE_START = "hot-switch", "pauseStartAgent", "continueStartAgent"

# Their actions.
DO_PRE_EXIT, DO_STOP, DO_PAUSE, DO_SAVE = "pre exit process", "stop_train", "pause_train", "save_and_exit"
DO_GLOBAL, DO_EXIT_NODES, DO_RESTART_NODES = "on_global_rank", "fault_nodes_exit", "fault_nodes_restart"
DO_CHANGE = "change_strategy"
DO_HOT_SWITCH, DO_STOP_SWITCH, DO_POD_RUNS = "hot switch", "stop switch", "new pod running"
DO_PAUSE_START, DO_CONTINUE_START = "pause_start_agent", "continue_start_agent"

# Strategies that a job may have, finest first, and what elastic training is called between ClusterD and its clients.
RETRY, IN_PLACE, RECOVER, ELASTIC, DUMP, EXIT = (
    "retry", "recover-in-place", "recover", "elastic-training", "dump", "exit",
)  # fmt: skip
LADDER = (RETRY, IN_PLACE, RECOVER, ELASTIC, DUMP, EXIT)
DOWNGRADE, UPGRADE, CONTINUE, MIGRATION = "downgrade", "upgrade", "continue", "migration"
JOB_LEVEL, POD_LEVEL = "job-rescheduling", "pod-rescheduling"
SCALE_IN, SCALE_OUT = '{"scale-in-strategy": "DP"}', '{"scale-out-strategy": "DP"}'
DUMP_EXIT = "dump_exit"

# Codes of a client's reports.
OK, ISOLATED = 0, 201
NOT_READY, RETRY_FAILED, ONLY_DUMP, ONLY_EXIT = 404, 405, 406, 499

# Labels and annotations of the PodGroup.
ENABLE = "process-recover-enable"
ON, PAUSE = "on", "pause"
STRATEGY, RESCHEDULE_WAIT = "recover-strategy", "wait-reschedule-timeout"
FAULT_SCHEDULING, POD_RESCHEDULING = "fault-scheduling", "pod-rescheduling"
SUB_HEALTHY, FRAMEWORK = "subHealthyStrategy", "framework"
GRACE_EXIT, HOT_SWITCHES, IGNORE = "graceExit", "hotSwitch", "ignore"
PLATFORM_STRATEGY, CONFIRM_FAULT, RESULT_FAULT = "ProcessRecoverStrategy", "ProcessConfirmFault", "ProcessResultFault"
TABLE_READY, RECOVER_RESULT = "RankTableReady", "ProcessRecoverStatus"

# Of pods.
FAULT_TYPE, SOFTWARE, RETRY_FAULT, SUB_HEALTH = "fault-type", "software", "retry-fault", "SubHealth"
IN_FLOW, OPERATOR, VOLCANO, BACKUP_NAME = "inHotSwitchFlow", "needOperatorOpe", "needVolcanoOpe", "backupNewPodName"
CREATE, DELETE, TRUE = "create", "delete", "true"
ELASTIC_WAIT = "MINDIO_WAIT_MINDX_TIME"

# Levels of faults that are nobody's business here.
UNHANDLED = frozenset({"NotHandleFault", "PreSeparateNPU", "PreSeparate"})
SUB_HEALTH_LEVEL = "SubHealthFault"

# Operations on the reset ConfigMap.
CLEAR, FLUSH, FAULT, RESTART_ALL = "clear", "notifyFaultFlushing", "fault", "restartAllProcess"

# Ways in which an incident ends.
RECOVERED, FELL_BACK, FAILED, CANCELLED = "recovered", "fell back", "failed", "cancelled"
