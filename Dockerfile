# An image that holds the command outbox, a relay for example, and nothing else: no shell, no files to write.
#
#   docker build -t outbox .
#   docker run --read-only -e DATABASE_URL=… -e KAFKA_BROKERS=… -p 9464:9464 outbox
#
# TestRelayInAnEmptyRoot builds with the same line and runs what comes of it. The digest pins the compiler; `make
# vulncheck` says when Go itself has to be newer, and `--build-arg GO_IMAGE=…` takes another.
ARG GO_IMAGE=golang:1.26.9@sha256:f1f0bcc2c524a3ced375fcb4d1ecb7aa371aa7070e112599aaca45cc02d0101b
FROM ${GO_IMAGE} AS build
WORKDIR /src
COPY . .
RUN GOWORK=off CGO_ENABLED=0 go build -ldflags=-s -o /out/outbox ./cmd/outbox

FROM scratch
COPY --from=build /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
COPY --from=build /out/outbox /outbox
USER 65532:65532
EXPOSE 9464
ENTRYPOINT ["/outbox"]
CMD ["relay"]
