/*
 * libtaskd.so: what a training process died of.
 *
 * A process that is killed by a signal leaves its parent one number. This library adds a line to it: which signal,
 * why, at which address, in which thread, in which training step. It comes into every process of a container by
 * LD_PRELOAD, so it does nothing at all, not even a system call, unless TASKD_CRASH_DIR names an absolute directory.
 *
 * Where it does, it is the first to get SIGSEGV, SIGBUS, SIGFPE, SIGILL and SIGABRT, appends a line to
 * TASKD_CRASH_DIR/crash-<pid>, and then takes itself out of the way:
 *
 *   default action before us    restored, and the signal sent again with its original siginfo: same exit status, same
 *                               core dump
 *   a handler before us         called as the kernel would have called it; if it returns, so do we
 *   it hands the signal back    (faulthandler restores what it found, which may be us, and raises): the one before it
 *                               gets it, in the end the default action
 *   it returns, fault repeats   after REPEATS of it in quick succession, without any progress, the default action ends it
 *   it returns, and that's it   the process lives, and the line is taken back
 *   it jumps out of the signal  likewise, but for the line
 *
 * Handlers that a program installs later come before ours. faulthandler then shows its traceback and raises the signal
 * anew, which loses code and address (it doesn't ask the kernel for them, so they aren't on the stack either).
 * taskd_crash_arm() puts us in front again, for a process that has done its set-up; taskd_set_step() does so at the
 * first step and now and then.
 *
 * Only async-signal-safe calls in the handler, no allocation, no locks, no thread-local storage, no symbols but those
 * beginning with taskd_. Nothing newer than glibc 2.17 is referred to.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define EXPORTED __attribute__((visibility("default")))
#define VARIABLE "TASKD_CRASH_DIR"
#define NAME "/crash-"
#define MARK(place) ((uintptr_t)(place) ^ (uintptr_t)0x7461736b64637261)

enum {
    KINDS = 5,
    LONGEST_PATH = 4000,
    LARGEST_FILE = 4096,     /* crash.py reads no more */
    STACK = 64 * 1024,       /* for a fault on a full stack; the widest registers and a second handler fit in */
    NESTED = 1024 * 1024,    /* a handler of ours this close above on the stack is one that called us */
    REPEATS = 1000,
    PACE = 10 * 1000 * 1000, /* nanoseconds; slower than that it is no loop, but a handler that lives with faults */
    DEPTH = 8,               /* handlers of one signal that we know */
    STEPS = 256,             /* between two looks whether somebody has come before us */
    PATIENCE = 1000          /* milliseconds in which another thread has written its line */
};

static const int signals[KINDS] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};

static struct watch {
    struct sigaction chain[DEPTH]; /* what was there before us, and what was there whenever we came in front again */
    int count;
    struct turn {
        pid_t thread;        /* that has called a handler of the chain */
        uintptr_t *mark;     /* from this place on its stack, where our word stands as long as the handler runs */
        int level;           /* in the chain */
    } turn;
    siginfo_t info;          /* what the kernel told it */
} watches[KINDS];

static char path[LONGEST_PATH + 32];
static size_t prefix;        /* length of "<directory>/crash-"; 0: nobody asked */
static int64_t step = -1;
static pid_t writer;
static struct {
    pid_t thread;
    int number;
    uint64_t registers;
    int64_t time;
    int count;
} repeated;
static char stack[STACK] __attribute__((aligned(16)));

struct line {
    off_t begin, end;        /* in the file; end is 0 if it isn't there */
};

static pid_t this_thread(void) { return (pid_t)syscall(SYS_gettid); }

/* --- the line ---------------------------------------------------------------------------------------------------- */

static int64_t nanoseconds(clockid_t clock)
{
    struct timespec now = {0, 0};
    clock_gettime(clock, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static char *put_text(char *at, const char *text)
{
    while (*text)
        *at++ = *text++;
    return at;
}

static char *put_number(char *at, uint64_t value, unsigned base)
{
    char digits[24];
    int count = 0;
    do
        digits[count++] = "0123456789abcdef"[value % base];
    while (value /= base);
    while (count)
        *at++ = digits[--count];
    return at;
}

static char *put_signed(char *at, const char *name, int64_t value)
{
    at = put_text(at, name);
    if (value < 0)
        *at++ = '-';
    return put_number(at, value < 0 ? 0 - (uint64_t)value : (uint64_t)value, 10);
}

/* The process is asked for now: we may be in a child that was forked long after we were loaded. */
static int open_file(int flags)
{
    char file[sizeof path];
    memcpy(file, path, prefix);
    *put_number(file + prefix, (uint64_t)getpid(), 10) = 0;
    return open(file, O_WRONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC | flags, 0600);
}

static struct line write_line(int number, const siginfo_t *info, pid_t thread)
{
    struct line written = {0, 0};
    char line[320], *at = line;

    at = put_signed(at, "taskd-crash 1 signal=", number);
    at = put_signed(at, " code=", info->si_code);
    if (info->si_code > 0) {
        at = put_text(at, " address=0x");
        at = put_number(at, (uint64_t)(uintptr_t)info->si_addr, 16);
    } else {
        at = put_signed(at, " sender=", info->si_pid);
    }
    at = put_signed(at, " pid=", getpid());
    at = put_signed(at, " thread=", thread);
    at = put_signed(at, " time=", nanoseconds(CLOCK_REALTIME));
    at = put_signed(at, " step=", __atomic_load_n(&step, __ATOMIC_RELAXED));
    *at++ = '\n';

    int descriptor = open_file(O_CREAT | O_APPEND);
    if (descriptor < 0)
        return written;
    off_t end = lseek(descriptor, 0, SEEK_END), length = at - line;
    /* A full disk is not what this process dies of. */
    if (end >= 0 && end + length <= LARGEST_FILE && write(descriptor, line, (size_t)length) == length)
        written = (struct line){end, end + length};
    close(descriptor);
    return written;
}

static void cut_line(struct line written)
{
    int descriptor = open_file(0);
    if (descriptor < 0)
        return;
    if (lseek(descriptor, 0, SEEK_END) == written.end) {
        int done = ftruncate(descriptor, written.begin);
        (void)done;
    }
    close(descriptor);
}

/* One thread at a time: nobody ends the process while another one writes. Who died while it held the lock, or held it
   when we were forked, is not waited for any longer. */
static int lock(pid_t thread)
{
    const struct timespec pause = {0, 1000000};
    pid_t nobody = 0;
    for (int waited = 0; waited < PATIENCE; waited++, nobody = 0) {
        if (__atomic_compare_exchange_n(&writer, &nobody, thread, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            return 1;
        nanosleep(&pause, NULL);
    }
    return 0;
}

static void unlock(int locked)
{
    if (locked)
        __atomic_store_n(&writer, 0, __ATOMIC_RELEASE);
}

static struct line record(int number, const siginfo_t *info, pid_t thread)
{
    int locked = lock(thread);
    struct line written = write_line(number, info, thread);
    unlock(locked);
    return written;
}

static void take_back(struct line written, pid_t thread)
{
    int locked = lock(thread);
    cut_line(written);
    unlock(locked);
}

/* --- and then ---------------------------------------------------------------------------------------------------- */

static void on_fatal(int number, siginfo_t *info, void *context);

static int is_function(const struct sigaction *action)
{
    return (action->sa_flags & SA_SIGINFO) || (action->sa_handler != SIG_DFL && action->sa_handler != SIG_IGN);
}

/* The default action for the signal as it came; it arrives when our handler returns. */
static void die(int number, siginfo_t *info)
{
    struct sigaction standard;
    memset(&standard, 0, sizeof standard);
    standard.sa_handler = SIG_DFL;
    sigaction(number, &standard, NULL);
    if (syscall(SYS_rt_tgsigqueueinfo, getpid(), this_thread(), number, info) != 0)
        syscall(SYS_tgkill, getpid(), this_thread(), number);
}

/* A handler as the kernel would call it. */
static void call(struct sigaction *action, int number, siginfo_t *info, ucontext_t *context)
{
    struct sigaction next = *action;
    sigset_t before, during = next.sa_mask;
    if (!(next.sa_flags & SA_NODEFER))
        sigaddset(&during, number);
    for (int each = 1; each < NSIG; each++)
        if (sigismember(&context->uc_sigmask, each) == 1)
            sigaddset(&during, each);
    if (next.sa_flags & (int)SA_RESETHAND) {
        memset(action, 0, sizeof *action);
        action->sa_handler = SIG_DFL;
    }
    sigprocmask(SIG_SETMASK, &during, &before);
    if (next.sa_flags & SA_SIGINFO)
        next.sa_sigaction(number, info, context);
    else
        next.sa_handler(number);
    sigprocmask(SIG_SETMASK, &before, NULL);
}

/* Where the thread is and what it has at hand: a program that gets anywhere changes it. */
static uint64_t registers(const ucontext_t *context)
{
#if defined(__x86_64__)
    const unsigned char *bytes = (const unsigned char *)context->uc_mcontext.gregs;
    size_t count = sizeof context->uc_mcontext.gregs;
#elif defined(__aarch64__)
    const unsigned char *bytes = (const unsigned char *)&context->uc_mcontext;
    size_t count = offsetof(mcontext_t, pstate);
#else
    const unsigned char *bytes = NULL;
    size_t count = 0;
    (void)context;
#endif
    uint64_t hash = 14695981039346656037u;
    while (count--)
        hash = (hash ^ *bytes++) * 1099511628211u;
    return hash;
}

/* How often in a row the same fault has come back; 0 for a new one. */
static int repeats(int number, const siginfo_t *info, pid_t thread, const ucontext_t *context)
{
    int64_t now = nanoseconds(CLOCK_MONOTONIC), since = now - repeated.time;
    uint64_t place = registers(context) ^ (uint64_t)(uintptr_t)(info->si_code > 0 ? info->si_addr : NULL);
    repeated.time = now;
    if (info->si_code > 0 && repeated.thread == thread && repeated.number == number && repeated.registers == place)
        return repeated.count = since < PACE ? repeated.count + 1 : 1;
    repeated.thread = thread;
    repeated.number = number;
    repeated.registers = place;
    return repeated.count = 0;
}

/* Whether a handler that we have called, and that has not returned, hands the signal back: it sends it by itself, or with
   what the kernel had told. A handler may also have jumped away; then nobody keeps our mark. */
static int handed_back(const struct watch *watch, const siginfo_t *info, pid_t thread, const uintptr_t *mark)
{
    const uintptr_t *before = watch->turn.mark;
    if (watch->turn.thread != thread || mark >= before || (uintptr_t)before - (uintptr_t)mark >= NESTED)
        return 0;
    if (*(volatile const uintptr_t *)before != MARK(before))
        return 0;
    return info->si_code <= 0 || (info->si_code == watch->info.si_code && info->si_addr == watch->info.si_addr);
}

static int still_ours(int number)
{
    struct sigaction now;
    return sigaction(number, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fatal;
}

static void on_fatal(int number, siginfo_t *info, void *context)
{
    int saved = errno, kind = 0;
    pid_t thread = this_thread();
    volatile uintptr_t mark = 0;
    uintptr_t *place = (uintptr_t *)&mark;
    while (kind < KINDS - 1 && signals[kind] != number)
        kind++;
    struct watch *watch = &watches[kind];
    struct turn before = watch->turn;
    struct line line = {0, 0};
    siginfo_t original;
    int again = 0, level = __atomic_load_n(&watch->count, __ATOMIC_ACQUIRE) - 1;

    if (handed_back(watch, info, thread, place)) {
        /* It is recorded; the one before that handler gets it. */
        level = before.level - 1;
        original = watch->info;
        info = &original;
    } else {
        again = repeats(number, info, thread, context);
        if (!again || again >= REPEATS)
            line = record(number, info, thread);
        watch->info = *info;
    }
    if (again >= REPEATS || level < 0 || !is_function(&watch->chain[level])) {
        die(number, info);
    } else {
        int fault = info->si_code > 0 && info != &original;
        mark = MARK(place);
        watch->turn = (struct turn){thread, place, level};
        call(&watch->chain[level], number, info, context);
        watch->turn = before;
        mark = 0;
        if (fault && line.end && still_ours(number))
            take_back(line, thread); /* it lives; if not, the fault comes again */
        else if (fault && again && !still_ours(number))
            record(number, info, thread); /* it comes again, but not to us */
    }
    errno = saved;
}

/* --- set-up ------------------------------------------------------------------------------------------------------ */

static void read_environment(void)
{
    const char *directory = secure_getenv(VARIABLE);
    size_t length = directory ? strlen(directory) : 0;
    if (!length || length > LONGEST_PATH || directory[0] != '/')
        return;
    memcpy(path, directory, length);
    memcpy(path + length, NAME, sizeof NAME - 1);
    prefix = length + sizeof NAME - 1;
}

/* To the thread that loads us, mostly the main one; two must not share it. */
static void give_stack(void)
{
    static int given;
    stack_t now, ours = {.ss_sp = stack, .ss_flags = 0, .ss_size = sizeof stack};
    if (!__atomic_exchange_n(&given, 1, __ATOMIC_RELAXED) && sigaltstack(NULL, &now) == 0 && (now.ss_flags & SS_DISABLE))
        sigaltstack(&ours, NULL);
}

/* Puts the library in front of all handlers of fatal signals. Returns how many are watched: 0 if nobody asked. */
EXPORTED int taskd_crash_arm(void)
{
    static int busy;
    int watched = 0;
    if (!prefix)
        read_environment();
    if (!prefix || __atomic_exchange_n(&busy, 1, __ATOMIC_ACQ_REL))
        return 0;
    struct sigaction ours, now;
    memset(&ours, 0, sizeof ours);
    ours.sa_sigaction = on_fatal;
    ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigfillset(&ours.sa_mask);
    give_stack();
    for (int kind = 0; kind < KINDS; kind++) {
        struct watch *watch = &watches[kind];
        if (sigaction(signals[kind], NULL, &now) != 0)
            continue;
        if (!(now.sa_flags & SA_SIGINFO) && now.sa_handler == SIG_IGN)
            continue; /* the program, or who started it, wants to live through this one */
        watched++;
        if ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == on_fatal)
            continue;
        const struct sigaction *top = watch->count ? &watch->chain[watch->count - 1] : NULL;
        if (!top || top->sa_sigaction != now.sa_sigaction) {
            if (watch->count == DEPTH)
                continue;
            watch->chain[watch->count] = now;
            __atomic_store_n(&watch->count, watch->count + 1, __ATOMIC_RELEASE);
        }
        sigaction(signals[kind], &ours, NULL);
    }
    __atomic_store_n(&busy, 0, __ATOMIC_RELEASE);
    return watched;
}

/* The training step that this process is in, for the line of a crash. */
EXPORTED void taskd_set_step(int64_t number)
{
    static unsigned calls;
    if (prefix && __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED) % STEPS == 0)
        taskd_crash_arm();
    __atomic_store_n(&step, number, __ATOMIC_RELAXED);
}

__attribute__((constructor)) static void loaded(void)
{
    if (getenv(VARIABLE))
        taskd_crash_arm();
}
