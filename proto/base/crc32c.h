/* CRC-32C (Castagnoli, reflected polynomial 0x82F63B78), as in iSCSI, RFC 3720
 * appendix B.4. The checksum of shards and of record logs. */
#ifndef BOOST_PROTO_BASE_CRC32C_H
#define BOOST_PROTO_BASE_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* Continues `crc` (0 to start) over `len` bytes. Any thread. */
uint32_t crc32c(uint32_t crc, const void *data, size_t len);

#endif
