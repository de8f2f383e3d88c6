package pg

// Repeated scans a text column into a string, of which the rows of a query often have the same value. It copies the
// value only if it differs from that of the row before. NULL becomes "".
type Repeated string

// ScanBytes implements [pgtype.BytesScanner].
func (r *Repeated) ScanBytes(text []byte) error {
	if string(text) != string(*r) {
		*r = Repeated(text)
	}
	return nil
}
