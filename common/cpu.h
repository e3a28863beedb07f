/* For C that compilers turn into vector instructions by themselves: one library, the best instructions of the processor
   that it finds itself on. FOR_EACH_CPU stands before a function. */

#ifndef LOGITMIX_CPU_H
#define LOGITMIX_CPU_H

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

#endif
