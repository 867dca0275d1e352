/* A program with handlers of its own, which come after libtaskd.so and before it again once it is armed anew. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGES = 500 };

static sigjmp_buf back;
static char *pages;
static long size;
static int faults;

/* As a garbage collector with write barriers does. */
static void allow(int number, siginfo_t *info, void *context)
{
    char *address = info->si_addr;
    (void)context;
    if (address >= pages && address < pages + PAGES * size)
        mprotect(address - (address - pages) % size, (size_t)size, PROT_READ | PROT_WRITE);
    else
        signal(number, SIG_DFL); /* and the fault comes again */
}

/* As one that gives up only when a fault comes back. */
static void third_time(int number, siginfo_t *info, void *context)
{
    (void)info, (void)context;
    if (++faults == 3)
        signal(number, SIG_DFL);
}

/* As a page that is guarded again and again. */
static void allow_once_more(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    faults++;
    mprotect(pages, (size_t)size, PROT_READ | PROT_WRITE);
}

static void tell(int number, siginfo_t *info, void *context)
{
    sigset_t mask;
    (void)context;
    sigprocmask(SIG_SETMASK, NULL, &mask);
    for (int each = 1; each < 32; each++)
        if (sigismember(&mask, each))
            printf("%d ", each);
    printf("are blocked in the handler of %d, code %d", number, info->si_code);
    printf(", address %p\n", info->si_code > 0 ? info->si_addr : NULL);
}

/* As libraries that try out what the processor or the memory can do. */
static void jump(int number, siginfo_t *info, void *context)
{
    (void)number, (void)info, (void)context;
    siglongjmp(back, 1);
}

static int flags = SA_SIGINFO, number = SIGSEGV;

static void handle(void (*handler)(int, siginfo_t *, void *))
{
    struct sigaction action;
    memset(&action, 0, sizeof action);
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    sigaddset(&action.sa_mask, SIGUSR2);
    sigaction(number, &action, NULL);
    int (*arm)(void);
    *(void **)&arm = dlsym(RTLD_DEFAULT, "taskd_crash_arm");
    if (arm && arm() == 0)
        puts("not armed");
}

static int try(int depth, long address)
{
    volatile char room[512];
    memset((void *)room, depth, sizeof room);
    if (depth)
        return try(depth - 1, address) + room[0];
    if (sigsetjmp(back, 1) == 0)
        *(volatile int *)address = 1;
    return 0;
}

static void *try_often(void *apart)
{
    for (int round = 0; round < 6; round++)
        try(2 + 3 * round, 8 + (apart ? 16 * round : 0));
    return NULL;
}

int main(int count, char **words)
{
    const char *way = count > 1 ? words[1] : "";
    pthread_t thread;
    size = sysconf(_SC_PAGESIZE);
    setvbuf(stdout, NULL, _IONBF, 0);
    if (!strcmp(way, "allow")) {
        pages = mmap(NULL, (size_t)(PAGES * size), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        handle(allow);
        for (int page = 0; page < PAGES; page++)
            pages[page * size] = 1;
    } else if (!strcmp(way, "again")) {
        pages = mmap(NULL, (size_t)size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        handle(allow_once_more);
        for (int round = 0; round < 3000; round++) {
            pages[0] = (char)round;
            mprotect(pages, (size_t)size, PROT_NONE);
        }
        printf("alive after %d\n", faults);
        return 0;
    } else if (!strcmp(way, "once")) {
        flags |= (int)SA_RESETHAND;
        handle(tell); /* and dies of the second one */
    } else if (!strcmp(way, "abort") || !strcmp(way, "abort-deferring")) {
        sigset_t mask;
        sigemptyset(&mask);
        sigaddset(&mask, SIGUSR1);
        sigprocmask(SIG_SETMASK, &mask, NULL);
        number = SIGABRT;
        flags |= !strcmp(way, "abort") ? SA_NODEFER : 0;
        handle(tell);
        errno = 77;
        kill(getpid(), SIGABRT);
        printf("alive, errno is %d\n", errno);
        return 0;
    } else if (!strcmp(way, "third-time")) {
        handle(third_time);
    } else {
        handle(jump);
        pthread_create(&thread, NULL, try_often, !strcmp(way, "jump-elsewhere") ? &thread : NULL);
        pthread_join(thread, NULL);
        puts("alive");
        return 0;
    }
    puts("lived");
    *(volatile int *)16 = 1;
    return 1;
}
