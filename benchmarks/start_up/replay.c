// Nodes that repeat what was recorded of real ones, on one filesystem server: replay.py writes the plans.
//
//   gcc -O2 -o replay replay.c
//   replay FIRST OTHER NODES MICROSECONDS RATE
//
// A line of a plan, FIRST's for the first node and OTHER's for each other: the number of the line whose end
// it follows (-1: the start), how many microseconds after, the kind of delayed.c's log, bytes, offset, path.
// Kind b is a barrier: it ends when all nodes have reached it. The server does what others ask, each from a
// socket of its own, answers MICROSECONDS later, and begins RATE operations per second at most, in the order in
// which they come (0: any number). It changes nothing: in place of w and c it looks for the path.
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

struct op { long after, gap_ns, bytes, offset, child, next; char kind, *path; };
struct plan { struct op *ops; long count, roots, barriers[16]; };
// Something that happens at a time: a node begins its line, or the server answers it.
struct event { long at, node, line; };

static struct plan plans[2];
static long nodes, delay_ns, slot_ns;

static void failed(const char *what) { perror(what); exit(1); }
static struct plan *plan_of(long node) { return &plans[node > 0]; }
static long now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

static struct plan load(const char *name) {
    struct plan plan = {NULL, 0, -1, {0}};
    FILE *file = fopen(name, "r");
    if (!file) failed(name);
    char path[8400];
    for (struct op op = {.child = -1}; fscanf(file, "%ld %ld %c %ld %ld %8399[^\n]", &op.after, &op.gap_ns, &op.kind,
                                             &op.bytes, &op.offset, path) == 6;) {
        if (!(plan.count & (plan.count - 1)))
            plan.ops = realloc(plan.ops, (plan.count ? 2 * plan.count : 1) * sizeof op);
        op.gap_ns *= 1000;
        op.path = strdup(path);
        if (op.kind == 'b') plan.barriers[op.bytes % 16] = plan.count;
        plan.ops[plan.count++] = op;
    }
    fclose(file);
    for (long line = plan.count; line--;) {
        struct op *op = &plan.ops[line];
        long *list = op->after < 0 ? &plan.roots : &plan.ops[op->after].child;
        op->next = *list;
        *list = line;
    }
    return plan;
}

// Waits until one of the sockets has something, or until a time.
static int wait_for(int sockets, struct epoll_event *ready, long until) {
    long left = until - now_ns();
    struct timespec time = {left / 1000000000, left % 1000000000};
    if (left < 0) time.tv_sec = time.tv_nsec = 0;
    int count = epoll_pwait2(sockets, ready, 64, until ? &time : NULL, NULL);
    if (count < 0) failed("epoll_pwait2");
    return count;
}

static int all_of(int *sockets) {
    int all = epoll_create1(EPOLL_CLOEXEC);
    for (long node = 0; node < nodes; node++) {
        struct epoll_event event = {EPOLLIN, {.u64 = node}};
        if (epoll_ctl(all, EPOLL_CTL_ADD, sockets[node], &event)) failed("epoll_ctl");
    }
    return all;
}

static void serve(const struct op *op) {
    static char data[1 << 20];
    struct stat about;
    int fd;
    if (op->kind == 'o' || op->kind == 'r') {
        fd = open(op->path, O_RDONLY | O_NONBLOCK);
        if (op->kind == 'r' && fd != -1 && pread(fd, data, op->bytes < 1 << 20 ? op->bytes : 1 << 20, op->offset) < 0)
            perror(op->path);
        close(fd);
    } else if (op->kind == 'd') {
        DIR *listed = opendir(op->path);
        while (listed && readdir(listed)) continue;
        if (listed) closedir(listed);
    } else {
        fstatat(AT_FDCWD, op->path, &about, AT_SYMLINK_NOFOLLOW);
    }
}

// Answers come in the order of the questions.
static void server(int *sockets) {
    int all = all_of(sockets), open_sockets = nodes;
    long first = 0, last = 0, size = 1 << 20, slot = 0;
    struct event *queue = malloc(size * sizeof *queue);
    struct epoll_event ready[64];
    while (open_sockets) {
        int count = wait_for(all, ready, first < last ? queue[first % size].at : 0);
        for (int k = 0; k < count; k++) {
            long node = ready[k].data.u64, line;
            if (recv(sockets[node], &line, sizeof line, 0) != sizeof line) {
                open_sockets--;
                epoll_ctl(all, EPOLL_CTL_DEL, sockets[node], NULL);
                continue;
            }
            long now = now_ns();
            slot = (slot > now ? slot : now) + slot_ns;
            serve(&plan_of(node)->ops[line]);
            if (last - first == size) exit(1);
            queue[last++ % size] = (struct event){slot + delay_ns, node, line};
        }
        for (; first < last && queue[first % size].at <= now_ns(); first++) {
            struct event *answer = &queue[first % size];
            if (send(sockets[answer->node], &answer->line, sizeof answer->line, 0) < 0) failed("send");
        }
    }
}

static struct event *heap;
static long waiting, room;

static void push(long at, long node, long line) {
    if (waiting == room) heap = realloc(heap, (room = room ? 2 * room : 1024) * sizeof *heap);
    long place = waiting++;
    for (; place && heap[(place - 1) / 2].at > at; place = (place - 1) / 2) heap[place] = heap[(place - 1) / 2];
    heap[place] = (struct event){at, node, line};
}

static struct event pop(void) {
    struct event first = heap[0], moved = heap[--waiting];
    long place = 0, child;
    while ((child = 2 * place + 1) < waiting) {
        if (child + 1 < waiting && heap[child + 1].at < heap[child].at) child++;
        if (heap[child].at >= moved.at) break;
        heap[place] = heap[child];
        place = child;
    }
    heap[place] = moved;
    return first;
}

static void follow(long node, long line, long now) {
    struct plan *plan = plan_of(node);
    for (; line != -1; line = plan->ops[line].next) push(now + plan->ops[line].gap_ns, node, line);
}

static double cpu_s(int whose) {
    struct rusage used;
    getrusage(whose, &used);
    return used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

int main(int count, char **given) {
    if (count != 6) return fprintf(stderr, "usage: replay FIRST OTHER NODES MICROSECONDS RATE\n"), 2;
    plans[0] = load(given[1]), plans[1] = load(given[2]), nodes = atol(given[3]);
    delay_ns = atol(given[4]) * 1000, slot_ns = atol(given[5]) ? 1000000000 / atol(given[5]) : 0;
    prctl(PR_SET_TIMERSLACK, 1);
    int *ours = calloc(nodes, sizeof *ours), *theirs = calloc(nodes, sizeof *theirs);
    for (long node = 0; node < nodes; node++) {
        int pair[2];
        if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair)) failed("socketpair");
        ours[node] = pair[0], theirs[node] = pair[1];
    }
    long longest = plans[0].count > plans[1].count ? plans[0].count : plans[1].count, *asked = calloc(nodes * longest, sizeof *asked);
    pid_t child = fork();
    for (long node = 0; node < nodes; node++) close(child ? theirs[node] : ours[node]);
    if (!child) return server(theirs), 0;

    int all = all_of(ours);
    long reached[16] = {0}, done = 0, to_do = 0, operations = 0, waited_ns = 0, late_ns = 0, began = now_ns(), now = began;
    struct epoll_event ready[64];
    for (long node = 0; node < nodes; node++) {
        to_do += plan_of(node)->count;
        follow(node, plan_of(node)->roots, began);
    }
    printf("{\"nodes\": %ld, \"rate\": %s, \"barriers_s\": [", nodes, given[5]);
    while (done < to_do) {
        while (waiting && heap[0].at <= (now = now_ns())) {
            struct event next = pop();
            struct op *op = &plan_of(next.node)->ops[next.line];
            if (op->kind != 'b') {
                asked[next.node * longest + next.line] = now;
                late_ns += now - next.at;
                operations++;
                if (send(ours[next.node], &next.line, sizeof next.line, 0) < 0) failed("send");
            } else if (++reached[op->bytes % 16] == nodes) {
                printf("%s%.2f", op->bytes ? ", " : "", (now - began) / 1e9);
                for (long node = 0; node < nodes; node++, done++)
                    follow(node, plan_of(node)->ops[plan_of(node)->barriers[op->bytes % 16]].child, now);
            }
        }
        // The last line may be a barrier, which nobody answers.
        int some = done < to_do ? wait_for(all, ready, waiting ? heap[0].at : 0) : 0;
        for (int k = 0; k < some; k++) {
            long node = ready[k].data.u64, line;
            if (recv(ours[node], &line, sizeof line, 0) != sizeof line) failed("recv");
            waited_ns += (now = now_ns()) - asked[node * longest + line];
            follow(node, plan_of(node)->ops[line].child, now);
            done++;
        }
    }
    for (long node = 0; node < nodes; node++) close(ours[node]);
    wait(NULL);
    printf("], \"operations\": %ld, \"mean_ms\": %.3f, \"late_ms\": %.3f, \"cpu_s\": [%.1f, %.1f]}\n", operations,
           waited_ns / 1e6 / operations, late_ns / 1e6 / operations, cpu_s(RUSAGE_SELF), cpu_s(RUSAGE_CHILDREN));
    return 0;
}
